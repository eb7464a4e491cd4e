"""An ordinary Keras script: it knows of no workers, servers or groups."""

import csv
import json
import os

import keras
import numpy as np


class Asks(keras.callbacks.Callback):
    """Asks the model, and a part of it, on the chief only, as trackers do."""

    chief_only = True

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            return
        inner = keras.Model(self.model.inputs, self.model.layers[1].output)
        asked.append(self.model.evaluate(x, y, batch_size=8, verbose=0))
        asked.append(self.model.predict_on_batch(x).sum(axis=0).tolist())
        asked.append(inner.predict(x, verbose=0).sum(axis=0)[:2].tolist())


asked = []
keras.utils.clear_session()
keras.utils.set_random_seed(3)
x = np.random.random((50, 6)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int64")
scale = keras.layers.Normalization()
scale.adapt(x)
model = keras.Sequential(
    [
        keras.Input((6,)),
        scale,
        keras.layers.Dense(8, "relu"),
        keras.layers.Dense(2),
    ]
)
model.compile(
    keras.optimizers.Adam(0.01),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
first = model.get_weights()
history = model.fit(
    *(x, y),
    batch_size=8,
    epochs=30,
    shuffle=False,
    validation_split=0.3,
    callbacks=[
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.EarlyStopping(patience=30, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=5),
        Asks(),
    ],
)
best = keras.models.load_model("best.keras")
model.save_weights("trained.weights.h5")
inner = keras.Model(model.inputs, model.layers[1].output)
with open("log.csv") as file:
    logged = [float(row["loss"]) for row in csv.DictReader(file)]
found = {
    "asked": asked,
    "first": [float(np.abs(w).sum()) for w in first],
    "history": history.history,
    "evaluated": model.evaluate(x, y, verbose=0),
    "best": best.evaluate(x, y, verbose=0),
    "predicted": model.predict(x, verbose=0).tolist(),
    "cut_out": inner.predict(x[:1], verbose=0).tolist(),
    "logged": logged,
    "weights": [float(np.abs(w).sum()) for w in model.get_weights()],
}
with open(f"found_{os.getpid()}.json", "w") as file:
    json.dump(found, file)
