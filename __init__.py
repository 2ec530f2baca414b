"""The root of the checkout: readers that resolve relative imports by path see the rooms as one package."""
