"""The four screens, the form, the replay and the dialogs."""
