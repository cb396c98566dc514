"""Plans: their files, layouts and checks, and how a plan adapts when devices drop out."""
