"""One optimizer step of a rank: its passes, what they weigh in the batch, and out-of-memory errors.
"""
