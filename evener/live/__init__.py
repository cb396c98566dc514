"""How trainings report their speed: the reporter, its files, and the training'\''s journal."""
