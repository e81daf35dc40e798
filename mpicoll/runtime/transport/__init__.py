"""How a Send and a Recv happen: as messages, or as loads and stores in a node's shared window."""
