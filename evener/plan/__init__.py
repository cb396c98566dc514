"""Plans: their files, layouts and checks, and new shares for a plan whose devices drop out."""
