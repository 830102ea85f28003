"""What every process of the project uses: children, waiting, pauses between attempts, files replaced as a whole."""
