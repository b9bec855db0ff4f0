DECIDES = "nothing"
