"""The `candor` command. Starts the services by module name and talks to them; imports none of them."""
