// Search runs in a Worker, which browsers refuse to start for pages opened from the file system. There, run the same
// script in a hidden frame instead. Served pages keep their Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    onmessage = null;
    onerror = null;
    onmessageerror = null;

    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.frame.addEventListener("load", () => this.start(String(url)), { once: true });
      document.body.append(this.frame);
    }

    start(url) {
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => setTimeout(() => this.emit(new MessageEvent("message", { data })));
      const script = scope.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const messages = this.waiting;
        this.waiting = null;
        messages.forEach((data) => this.postMessage(data));
      };
      script.onerror = () => this.emit(new Event("error"));
      scope.document.body.append(script);
    }

    emit(event) {
      this.dispatchEvent(event);
      this[`on${event.type}`]?.(event);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else {
        const scope = this.frame.contentWindow;
        setTimeout(() => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
      }
    }

    terminate() {
      this.frame.remove();
    }
  };
}
