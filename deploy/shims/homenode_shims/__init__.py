"""What the schedulers of fleets need to hear the agents of their hosts."""
