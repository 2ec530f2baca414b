"""What a node shows of itself and of the network: its event log, one request across boxes, metrics, costs"""
