"""The dashboard: pages that a browser shows of the network, drawn from what the admin API tells, too"""
