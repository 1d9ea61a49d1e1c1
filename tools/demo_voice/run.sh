#!/bin/bash
# run.sh WORK STAGE: one stage of README.md, for at most MINUTES. Status 3: run the same stage again.
# WORK holds texts.txt.gz (make_text.py) and am_michael.bin (from kokoro-js); stages fill the rest.
set -e
W=$(realpath "$1") PY=${PY:-python3} DEV=${DEV:-cuda} CORES=${CORES:-16} MINUTES=${MINUTES:-9}
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE"
export PYTHONPATH=$HERE/../..:$PYTHONPATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
T=$W/spoken.txt.gz S=$W/am_michael.bin M="--minutes $MINUTES --device $DEV"

teach() { # SPEAKER HOURS
  $PY teacher.py "$T" "$W/audio" "$1" "$2" --minutes "$MINUTES" --workers "$CORES" --device "$DEV" --style "$S" $SHARE
}

case $2 in
  texts) $PY everyday_text.py "$W/texts.txt.gz" held_out.txt "$T" 150000 80000
    $PY make_tokenizer.py "$T" "$W/tok" 1000 ;;
  # ---- first run: a codec by spectral losses; discriminators from 40 % of the time
  ada) teach ada "${HOURS:-15}" ;;
  max) teach max "${HOURS:-15}" ;;
  codec) $PY train_codec.py "$W/audio" "$W/codec1.pt" "${SECONDS_IN_ALL:-1200}" $M --gan 0.4 ;;
  gate-codec) $PY evaluate.py "$W/gates.json" "$W/codec1.pt" --style "$S" ${MEASURES:+--measures $MEASURES} ;;  # >= 2.7 and 98 % of the words
  # ---- second run: goes on from the first codec
  codec2) $PY train_codec.py "$W/audio" "$W/codec2.pt" "${SECONDS_IN_ALL:-1200}" $M --init "$W/codec1.pt" \
    --gan 0.35 --items 48 --part 20 ;;
  gate-codec2) $PY evaluate.py "$W/gates.json" "$W/codec2.pt" --style "$S" ${MEASURES:+--measures $MEASURES} ;;  # >= 3.3
  # ---- third run: after `ada` and `max` with HOURS=60
  encode) $PY encode.py "$W/audio" "$W/codec2.pt" "$W/codes.npz" $M ;;
  talker) $PY train_talker.py "$W/codes.npz" "$T" "$W/tok" "$W/tts.pt" "${SECONDS_IN_ALL:-1080}" $M $ROWS ;;
  sweep) $PY sweep.py "$W/tts.pt" "$W/codec2.pt" "$W/tok" "$W/sweep.json" --device "$DEV" --workers "$CORES" \
    --settings 0.5,20,0.5,20 0.7,50,0.7,50 0.9,50,0.9,50 0.7,50,0.1,20 0,1,0,1 ;;
  export) $PY export.py "$W/tts.pt" "$W/codec2.pt" "$W/tok" "$W/checkpoint" ${SAMPLING:-0.5 20 0.5 20} ;;
  gate-talker) $PY evaluate.py "$W/gates.json" "$W/checkpoint" --style "$S" ;;  # within 0.3 of the codec alone
  parity) $PY parity.py "$W/checkpoint" "$W/tts.pt" "$W/codec2.pt" "$W/tok" ;;
  # ---- fourth run: what people type, and a beginning without a click. It begins from a checkpoint.
  unpack) $PY unpack.py "${CHECKPOINT:-../../qwen_megakernel/demo_voice}" "$W/old" ;;
  written) $PY written_text.py "$T" "$W/written.jsonl.gz" 64000 ;;
  learn-written) mkdir -p "$W/learned"
    $PY learn_written.py "$W/written.jsonl.gz" "$W/old" "$W/learned" "${SECONDS_IN_ALL:-150}" $M $ROWS ;;
  learn-start) $PY learn_start.py "$W/learned/spoken.npz" "$W/old/codec.pt" "$W/learned/start.pt" \
    "${SECONDS_IN_ALL:-130}" $M ;;
  first-samples) $PY learn_first_samples.py "$W/learned/spoken.npz" "$W/old/codec.pt" "$W/learned/start.pt" \
    "$W/learned/codec.pt" 400 ;;
  export-learned) $PY export.py "$W/learned/tts.pt" "$W/learned/codec.pt" "$W/learned/tok" "$W/checkpoint" \
    ${SAMPLING:-0.5 20 0.5 20} ;;
  gate-typed) $PY as_typed.py "$W/checkpoint" ;;  # 200 sentences as people type them
  *) echo "run.sh WORK STAGE, with a stage out of: texts ada max codec gate-codec codec2 gate-codec2 encode" \
    "talker sweep export gate-talker parity unpack written learn-written learn-start first-samples" \
    "export-learned gate-typed" >&2
    exit 2 ;;
esac
