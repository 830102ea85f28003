"""What is left of a run for people and programs: report.json, and report.html as one self-contained file."""
