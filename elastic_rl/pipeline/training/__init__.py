"""How rewarded samples become a step: the batch, the trainer groups as one, their turns on the devices, their commits.
"""
