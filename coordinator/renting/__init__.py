"""What to rent: offers of a market, how far apart they are, and which of them serve a model best."""
