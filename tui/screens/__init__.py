"""The four screens, the form and the dialogs."""
