"""How fast a member is, and whether it is right: a row is proved against float64 first, then timed in turn with other libraries."""
