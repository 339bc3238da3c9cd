from moetail.cli import app

app()
