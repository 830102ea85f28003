"""Groups that wait for their step elsewhere: what is known of them, how they are written, and how they are read."""
