DECIDES = "evaluation"
