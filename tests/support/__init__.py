"""What tests share: real parts that they start, and clients and simulations of the parts."""
