"""The app's four screens, the form of a search, and the dialogs."""
