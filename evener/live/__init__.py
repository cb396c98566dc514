"""What a training process reports while it runs, and the readers of these reports."""
