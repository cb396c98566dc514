"""The three screens, the form, the replay and the dialogs."""
