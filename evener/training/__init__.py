"""Training processes of any framework: who they are, which rows are theirs, when shares change."""
