"""One file for each group of commands; `lorikeet_admin.app` puts them together."""
