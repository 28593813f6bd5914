"""Tables that compare methods: statistics, and forms for terminal, file and paper."""
