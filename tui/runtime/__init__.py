"""The machinery behind the screens: threads, their messages, and the app object that screens talk to."""
