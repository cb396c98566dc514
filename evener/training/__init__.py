"""Rules for training processes of any framework: their ranks, their rows, and changes of shares."""
