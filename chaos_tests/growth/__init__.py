"""Growth: a long run without faults, in which nothing may grow with its steps. What is measured, and how it is judged.
"""
