"""How is a token tree grown, checked and committed?"""
