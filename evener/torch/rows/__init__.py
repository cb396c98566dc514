"""Data loading: which rows of each batch a rank gets, how they are fetched, and batch structure."""
