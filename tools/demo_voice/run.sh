#!/bin/bash
# run.sh WORK: the whole pipeline, in the order of README.md.  Expects in WORK: espeak/ (libraries and
# espeak-ng-data), texts.txt.gz (make_text.py), tok/ (make_tokenizer.py), codec0.pt (a first codec).
set -e
W=$(realpath "$1") PY=${PY:-python3} DEV=${DEV:-cuda} CORES=${CORES:-16}
cd "$(dirname "$0")"
export OMP_NUM_THREADS=4

join() { # the audio of a folder as one stream
  $PY -c "import glob, sys, numpy as np
f = sorted(glob.glob(sys.argv[1] + '/audio_*.npy'))
np.save(sys.argv[1] + '.npy', np.concatenate([np.load(x) for x in f]))" "$1"
}

$PY everyday_text.py "$W/texts.txt.gz" sent50.txt "$W/texts2.txt.gz" 150000 80000
$PY make_audio.py "$W/texts2.txt.gz" "$W/espeak" "$W/first" 8500 "$CORES" && join "$W/first"
$PY train_codec.py "$W/first.npy" "$W/codec1.pt" 290 --init "$W/codec0.pt" --device "$DEV"
$PY make_audio.py "$W/texts2.txt.gz" "$W/espeak" "$W/audio" 170000 "$CORES"
$PY encode.py "$W/audio" "$W/codec1.pt" "$W/codes.npz" "$DEV"
$PY train_talker.py "$W/codes.npz" "$W/texts2.txt.gz" "$W/tok" "$W/tts.pt" 1080 --device "$DEV"
$PY make_audio.py "$W/texts2.txt.gz" "$W/espeak" "$W/second" 25000 "$CORES" && join "$W/second"
# of this run the weights of the first half are the result: codec2_plain.pt, saved before the
# discriminators join
$PY train_codec.py "$W/second.npy" "$W/codec2.pt" 960 --init "$W/codec1.pt" --decoder-only \
  --gan 0.5 --gan-items 32 --lr 8e-4 --mel 3 --ema 0.999 --device "$DEV"
$PY ceiling.py "$W/codec2_plain.pt" "$W/espeak" sent50.txt "$CORES"
$PY sweep.py "$W/tts.pt" "$W/codec2_plain.pt" "$W/tok" sent50.txt "$W/sweep.json" --device "$DEV" \
  --settings 0.5,20,0.5,20 0.7,50,0.7,50 0.9,50,0.9,50 0,1,0,1
$PY export.py "$W/tts.pt" "$W/codec2_plain.pt" "$W/tok" "$W/checkpoint" 0.5 20 0.5 20
$PY parity.py "$W/checkpoint" "$W/tts.pt" "$W/codec2_plain.pt" "$W/tok"
$PY evaluate.py "$W/checkpoint" "$W/espeak" sent50.txt "$W/eval.json"
