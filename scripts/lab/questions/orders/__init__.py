"""Which order serves best, with forecasts as rough as real ones: docs/results/orders.md."""
