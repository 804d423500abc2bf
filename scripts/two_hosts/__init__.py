"""Two network hosts on one Linux machine, with a link between them that can be slowed and cut."""
