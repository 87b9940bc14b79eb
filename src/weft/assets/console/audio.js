// Plays float32 chunks one after the other without gaps.

const LEAD_S = 0.06; // the first chunk begins so long after it came, so that the next ones come in time

export class Player {
  #context = null;
  #next = 0;
  #sources = new Set();

  constructor(onChange) {
    this.onChange = onChange;
  }

  get playing() {
    return this.#sources.size > 0;
  }

  // To be called from a click or a key: browsers allow no sound before.
  unlock() {
    this.#context ??= new AudioContext();
    if (this.#context.state === "suspended") this.#context.resume();
  }

  // `data`: base64 of little-endian float32 samples.
  play(data, rate) {
    const samples = decode(data);
    if (this.#context === null || samples.length === 0) return;
    const buffer = this.#context.createBuffer(1, samples.length, rate);
    buffer.copyToChannel(samples, 0);
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#context.destination);
    source.onended = () => this.#ended(source);
    const start = this.#next > this.#context.currentTime ? this.#next : this.#context.currentTime + LEAD_S;
    source.start(start);
    this.#next = start + buffer.duration;
    this.#sources.add(source);
    this.onChange();
  }

  stop() {
    for (const source of this.#sources) source.stop();
    this.#sources.clear();
    this.#next = 0;
    this.onChange();
  }

  #ended(source) {
    this.#sources.delete(source);
    this.onChange();
  }
}

function decode(data) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 2 }, (_, i) => view.getFloat32(4 * i, true));
}
