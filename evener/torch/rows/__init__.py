"""Data loading: which rows of each batch a rank gets, and how they are fetched and cut."""
