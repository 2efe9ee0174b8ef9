"""Train the embedded pair: `python tools/train_demo_pair.py --out FOLDER`."""

from demo_pair.train import main

if __name__ == "__main__":
    main()
