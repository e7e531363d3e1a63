"""How many edges, in which layers, and when: budgets, shares and schedules."""
