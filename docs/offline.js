// Pages opened from a folder may start no Worker, and the search runs in one. There a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.document.write(
        "<!doctype html><script>" +
          "self.postMessage = (data) => parent.postMessage(data, '*');" +
          "self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {" +
          "  const script = document.createElement('script');" +
          "  script.src = url; script.onload = done; document.head.append(script);" +
          "})), Promise.resolve());" +
          "<\/script><script src='" + url + "'><\/script>",
      );
      inner.document.close();
      this.frame.addEventListener("load", () => {
        this.ready = true;
        for (const data of this.waiting) this.deliver(data);
      });
      addEventListener("message", (event) => {
        if (event.source === inner) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }
    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
