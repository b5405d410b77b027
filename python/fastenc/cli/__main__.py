from fastenc.cli import main

main()
