"""One module a group of rows. Each has `measure(lab, sizes)`, which yields its rows as they are known."""
