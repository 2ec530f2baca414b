"""Which services a network serves: its catalogue, and on which boxes each is hosted."""
