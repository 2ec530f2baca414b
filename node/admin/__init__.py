"""The admin API `/p2p/v1`, who may use it, and where it and the dashboard learn of the network"""
