"""What training processes of every framework share: who they are, which rows are theirs, when shares change."""
