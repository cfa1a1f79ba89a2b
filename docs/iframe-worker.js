// A page that is opened from disk may start no worker, and the search is one: there it runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), {hidden: true}));
      const scope = this.scope = frame.contentWindow;
      const load = address => new Promise((resolve, reject) => {
        const script = scope.document.createElement("script");
        Object.assign(script, {src: address, onload: resolve, onerror: reject});
        scope.document.body.append(script);
      });
      scope.importScripts = (...addresses) => addresses.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      scope.postMessage = data => {
        const event = new MessageEvent("message", {data});
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.ready = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", {data})));
    }

    terminate() { this.scope.frameElement.remove(); }
  };
}
