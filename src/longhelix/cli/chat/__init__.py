"""`longhelix chat`: what is said, how it is typed, and how it is answered."""
