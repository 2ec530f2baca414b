"""Looking at a network: its topology, its events, and one request across boxes"""
