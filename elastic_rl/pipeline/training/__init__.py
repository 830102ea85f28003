"""How rewarded samples become a step: the batch, the trainer groups as one, their phases on the devices, their commits.
"""
