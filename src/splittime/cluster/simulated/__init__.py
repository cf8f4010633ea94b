"""A fleet of up to thousands of servers on paper: the gateway's routing and the controller's decisions, in virtual
time."""
