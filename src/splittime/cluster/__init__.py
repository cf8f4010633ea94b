"""Several servers behind gateways, scaled by what they have to do: `splittime up`."""
