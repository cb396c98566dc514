// A page that is opened as a file may not start workers: the search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const deliver = (to, data) => to.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = data => setTimeout(() => {
        this.onmessage?.({ data });
        deliver(this, data);
      });
      const loads = path => new Promise((done, fail) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: path, onload: done, onerror: fail });
        inside.document.body.append(script);
      });
      inside.importScripts = (...paths) => paths.reduce((before, path) => before.then(() => loads(path)), Promise.resolve());
      const ready = loads(url);
      this.postMessage = data => ready.then(() => deliver(inside, data));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
