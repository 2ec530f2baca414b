"""Which services are hosted by which engines of a network, judged by replaying what was asked lately."""
